// castiron emit --kernel gemm_few --shape 16x64 --codec q5_0 --tokens 2 --numerics fast --isa avx2 --threads 2
// 360 lines, sha256 64937dcdefc0cad414cee2a8f79a211ad9b119a7aaa55ab1252657a7a3b7cd2d
            %17:2 = scf.for %14 = %c0 to %c2 step %c1 iter_args(%15 = %c4, %16 = %c4) -> (vector<8xf32>, vector<8xf32>) {
              %18 = arith.addi %9, %c1 : index
              memref.prefetch %m3[%18, %14, %c0], read, locality<3>, data : memref<1x2x352xi8>
              %19 = arith.addi %9, %c1 : index
              memref.prefetch %m3[%19, %14, %c5], read, locality<3>, data : memref<1x2x352xi8>
              %20 = arith.addi %9, %c1 : index
              memref.prefetch %m3[%20, %14, %c6], read, locality<3>, data : memref<1x2x352xi8>
              %21 = arith.addi %9, %c1 : index
              memref.prefetch %m3[%21, %14, %c7], read, locality<3>, data : memref<1x2x352xi8>
              %22 = arith.addi %9, %c1 : index
              memref.prefetch %m3[%22, %14, %c8], read, locality<3>, data : memref<1x2x352xi8>
              %23 = arith.addi %9, %c1 : index
              memref.prefetch %m3[%23, %14, %c9], read, locality<3>, data : memref<1x2x352xi8>
              %24 = arith.muli %10, %c10 : index
              %25 = vector.load %m3[%9, %14, %24] : memref<1x2x352xi8>, vector<16xi8>
              %26 = vector.bitcast %25 : vector<16xi8> to vector<8xf16>
              %27 = arith.extf %26 : vector<8xf16> to vector<8xf32>
              %28 = arith.mulf %27, %c11 : vector<8xf32>
              %29 = arith.addi %12, %c1 : index
              %30 = memref.load %m2[%12, %14] : memref<2x2xi32>
              %31 = arith.muli %30, %c12 : i32
              %32 = vector.broadcast %31 : i32 to vector<8xi32>
              %33 = memref.load %m2[%29, %14] : memref<2x2xi32>
              %34 = arith.muli %33, %c12 : i32
              %35 = vector.broadcast %34 : i32 to vector<8xi32>
              %36 = arith.muli %10, %c13 : index
              %37 = arith.addi %c13, %36 : index
              %38 = vector.load %m3[%9, %14, %37] : memref<1x2x352xi8>, vector<32xi8>
              %39 = vector.bitcast %38 : vector<32xi8> to vector<8xi32>
              %40 = arith.andi %39, %c14 : vector<8xi32>
              %41 = arith.shrui %39, %c15 : vector<8xi32>
              %42 = arith.andi %41, %c16 : vector<8xi32>
              %43 = arith.shrui %39, %c17 : vector<8xi32>
              %44 = arith.andi %43, %c18 : vector<8xi32>
              %45 = arith.muli %10, %c13 : index
              %46 = arith.addi %c19, %45 : index
              %47 = vector.load %m3[%9, %14, %46] : memref<1x2x352xi8>, vector<32xi8>
              %48 = vector.bitcast %47 : vector<32xi8> to vector<8xi32>
              %49 = arith.shli %48, %c20 : vector<8xi32>
              %50 = arith.andi %49, %c21 : vector<8xi32>
              %51 = arith.ori %40, %42 : vector<8xi32>
              %52 = arith.ori %51, %44 : vector<8xi32>
              %53 = arith.ori %52, %50 : vector<8xi32>
              %54 = vector.bitcast %53 : vector<8xi32> to vector<32xi8>
              %55 = arith.muli %14, %c3 : index
              %56 = memref.load %m0[%12, %55] : memref<2x16xi32>
              %57 = vector.broadcast %56 : i32 to vector<8xi32>
              %58 = vector.bitcast %57 : vector<8xi32> to vector<32xi8>
              %59 = llvm.call_intrinsic "llvm.x86.avx2.pmadd.ub.sw"(%54, %58) : (vector<32xi8>, vector<32xi8>) -> vector<16xi16>
              %60 = memref.load %m0[%29, %55] : memref<2x16xi32>
              %61 = vector.broadcast %60 : i32 to vector<8xi32>
              %62 = vector.bitcast %61 : vector<8xi32> to vector<32xi8>
              %63 = llvm.call_intrinsic "llvm.x86.avx2.pmadd.ub.sw"(%54, %62) : (vector<32xi8>, vector<32xi8>) -> vector<16xi16>
              %64 = arith.shrui %39, %c22 : vector<8xi32>
              %65 = arith.andi %64, %c14 : vector<8xi32>
              %66 = arith.shrui %39, %c23 : vector<8xi32>
              %67 = arith.andi %66, %c16 : vector<8xi32>
              %68 = arith.shrui %39, %c24 : vector<8xi32>
              %69 = arith.andi %68, %c18 : vector<8xi32>
              %70 = arith.shli %48, %c25 : vector<8xi32>
              %71 = arith.andi %70, %c21 : vector<8xi32>
              %72 = arith.ori %65, %67 : vector<8xi32>
              %73 = arith.ori %72, %69 : vector<8xi32>
              %74 = arith.ori %73, %71 : vector<8xi32>
              %75 = vector.bitcast %74 : vector<8xi32> to vector<32xi8>
              %76 = arith.muli %14, %c3 : index
              %77 = arith.addi %76, %c1 : index
              %78 = memref.load %m0[%12, %77] : memref<2x16xi32>
              %79 = vector.broadcast %78 : i32 to vector<8xi32>
              %80 = vector.bitcast %79 : vector<8xi32> to vector<32xi8>
// 162 lines more
              %243 = arith.ori %242, %238 : vector<8xi32>
              %244 = vector.bitcast %243 : vector<8xi32> to vector<32xi8>
              %245 = arith.muli %14, %c3 : index
              %246 = arith.addi %245, %c50 : index
              %247 = memref.load %m0[%12, %246] : memref<2x16xi32>
              %248 = vector.broadcast %247 : i32 to vector<8xi32>
              %249 = vector.bitcast %248 : vector<8xi32> to vector<32xi8>
              %250 = llvm.call_intrinsic "llvm.x86.avx2.pmadd.ub.sw"(%244, %249) : (vector<32xi8>, vector<32xi8>) -> vector<16xi16>
              %251 = arith.addi %221, %250 : vector<16xi16>
              %252 = llvm.call_intrinsic "llvm.x86.avx2.pmadd.wd"(%251, %c35) : (vector<16xi16>, vector<16xi16>) -> vector<8xi32>
              %253 = arith.addi %136, %252 : vector<8xi32>
              %254 = memref.load %m0[%29, %246] : memref<2x16xi32>
              %255 = vector.broadcast %254 : i32 to vector<8xi32>
              %256 = vector.bitcast %255 : vector<8xi32> to vector<32xi8>
              %257 = llvm.call_intrinsic "llvm.x86.avx2.pmadd.ub.sw"(%244, %256) : (vector<32xi8>, vector<32xi8>) -> vector<16xi16>
              %258 = arith.addi %226, %257 : vector<16xi16>
              %259 = llvm.call_intrinsic "llvm.x86.avx2.pmadd.wd"(%258, %c35) : (vector<16xi16>, vector<16xi16>) -> vector<8xi32>
              %260 = arith.addi %143, %259 : vector<8xi32>
              %261 = arith.sitofp %253 : vector<8xi32> to vector<8xf32>
              %262 = arith.sitofp %260 : vector<8xi32> to vector<8xf32>
              %263 = arith.mulf %261, %27 : vector<8xf32>
              %264 = memref.load %m1[%12, %14] : memref<2x2xf32>
              %265 = vector.broadcast %264 : f32 to vector<8xf32>
              %266 = math.fma %263, %265, %15 : vector<8xf32>
              %267 = arith.mulf %262, %27 : vector<8xf32>
              %268 = memref.load %m1[%29, %14] : memref<2x2xf32>
              %269 = vector.broadcast %268 : f32 to vector<8xf32>
              %270 = math.fma %267, %269, %16 : vector<8xf32>
              scf.yield %266, %270 : vector<8xf32>, vector<8xf32>
            }
