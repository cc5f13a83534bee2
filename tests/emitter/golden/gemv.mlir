// castiron emit --kernel gemv --shape 32x64 --codec q4_1 --isa avx2 --threads 2
// 727 lines, sha256 6fd045e9deef9db9e6ec00e5d96df6404b9824833865a7876593b6541a3f6226
        %59:4 = scf.for %54 = %c0 to %c2 step %c1 iter_args(%55 = %c13, %56 = %c13, %57 = %c13, %58 = %c13) -> (vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>) {
          %60 = arith.subi %54, %c0 : index
          %61 = arith.addi %54, %c10 : index
          %62 = arith.divui %61, %c2 : index
          %63 = arith.remui %61, %c2 : index
          %64 = arith.addi %47, %62 : index
          %65 = arith.addi %49, %62 : index
          %66 = arith.addi %47, %62 : index
          %67 = arith.addi %49, %62 : index
          %68 = arith.addi %47, %62 : index
          %69 = arith.addi %49, %62 : index
          %70 = arith.addi %47, %62 : index
          %71 = arith.addi %49, %62 : index
          %72 = arith.addi %47, %62 : index
          %73 = arith.addi %49, %62 : index
          %74 = arith.muli %60, %c7 : index
          memref.prefetch %m1[%64, %63, %c0], read, locality<3>, data : memref<2x2x320xi8>
          memref.prefetch %m1[%65, %63, %c0], read, locality<3>, data : memref<2x2x320xi8>
          %75 = memref.load %10[%c0, %74] : memref<1x64xf32>
          %76 = vector.broadcast %75 : f32 to vector<8xf32>
          %77 = vector.load %m1[%47, %54, %c3] : memref<2x2x320xi8>, vector<32xi8>
          %78 = vector.bitcast %77 : vector<32xi8> to vector<8xi32>
          %79 = arith.andi %78, %c14 : vector<8xi32>
          %80 = arith.sitofp %79 : vector<8xi32> to vector<8xf32>
          %81 = arith.mulf %80, %76 : vector<8xf32>
          %82 = vector.load %m1[%47, %54, %c15] : memref<2x2x320xi8>, vector<32xi8>
          %83 = vector.bitcast %82 : vector<32xi8> to vector<8xi32>
          %84 = arith.andi %83, %c14 : vector<8xi32>
          %85 = arith.sitofp %84 : vector<8xi32> to vector<8xf32>
          %86 = arith.mulf %85, %76 : vector<8xf32>
          %87 = vector.load %m1[%49, %54, %c3] : memref<2x2x320xi8>, vector<32xi8>
          %88 = vector.bitcast %87 : vector<32xi8> to vector<8xi32>
          %89 = arith.andi %88, %c14 : vector<8xi32>
          %90 = arith.sitofp %89 : vector<8xi32> to vector<8xf32>
          %91 = arith.mulf %90, %76 : vector<8xf32>
          %92 = vector.load %m1[%49, %54, %c15] : memref<2x2x320xi8>, vector<32xi8>
          %93 = vector.bitcast %92 : vector<32xi8> to vector<8xi32>
          %94 = arith.andi %93, %c14 : vector<8xi32>
          %95 = arith.sitofp %94 : vector<8xi32> to vector<8xf32>
          %96 = arith.mulf %95, %76 : vector<8xf32>
// 528 lines more
          %617 = memref.load %11[%c0, %60] : memref<1x2xf32>
          %618 = vector.broadcast %617 : f32 to vector<8xf32>
          %619 = math.fma %616, %618, %613 : vector<8xf32>
          %620 = vector.load %m1[%49, %54, %c10] : memref<2x2x320xi8>, vector<16xi8>
          %621 = vector.bitcast %620 : vector<16xi8> to vector<8xf16>
          %622 = arith.extf %621 : vector<8xf16> to vector<8xf32>
          %623 = math.fma %589, %622, %58 : vector<8xf32>
          %624 = vector.load %m1[%49, %54, %c52] : memref<2x2x320xi8>, vector<16xi8>
          %625 = vector.bitcast %624 : vector<16xi8> to vector<8xf16>
          %626 = arith.extf %625 : vector<8xf16> to vector<8xf32>
          %627 = memref.load %11[%c0, %60] : memref<1x2xf32>
          %628 = vector.broadcast %627 : f32 to vector<8xf32>
          %629 = math.fma %626, %628, %623 : vector<8xf32>
          scf.yield %599, %609, %619, %629 : vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>
        }
