// castiron emit --kernel experts --shape 2x16x64 --codec bf16 --tokens 2 --isa avx2 --threads 2
// 179 lines, sha256 1ae95ed93e60abc1df961737177f1874229c7477b06039ba1fc73c18c95f589c
        %17:2 = scf.for %14 = %c0 to %c1 step %c6 iter_args(%15 = %c5, %16 = %c5) -> (vector<8xf32>, vector<8xf32>) {
          %18 = arith.addi %14, %c7 : index
          %19 = arith.divui %18, %c1 : index
          %20 = arith.remui %18, %c1 : index
          %21 = arith.addi %11, %19 : index
          %22 = arith.addi %11, %19 : index
          %23 = arith.addi %11, %19 : index
          %24 = arith.addi %11, %19 : index
          %25 = arith.addi %21, %4 : index
          memref.prefetch %m1[%25, %20, %c0], read, locality<3>, data : memref<2x32x64xi8>
          %26 = arith.addi %11, %4 : index
          %27 = vector.load %m1[%26, %14, %c0] : memref<2x32x64xi8>, vector<32xi8>
          %28 = vector.bitcast %27 : vector<32xi8> to vector<8xi32>
          %29 = arith.shli %28, %c8 : vector<8xi32>
          %30 = arith.andi %28, %c9 : vector<8xi32>
          %31 = vector.bitcast %29 : vector<8xi32> to vector<8xf32>
          %32 = vector.bitcast %30 : vector<8xi32> to vector<8xf32>
          %33 = arith.addi %11, %4 : index
          %34 = vector.load %m1[%33, %14, %c1] : memref<2x32x64xi8>, vector<32xi8>
          %35 = vector.bitcast %34 : vector<32xi8> to vector<8xi32>
          %36 = arith.shli %35, %c8 : vector<8xi32>
          %37 = arith.andi %35, %c9 : vector<8xi32>
          %38 = vector.bitcast %36 : vector<8xi32> to vector<8xf32>
          %39 = vector.bitcast %37 : vector<8xi32> to vector<8xf32>
          %40 = arith.subi %14, %c0 : index
          %41 = arith.muli %40, %c10 : index
          %42 = memref.load %7[%41] : memref<64xf32>
          %43 = vector.broadcast %42 : f32 to vector<8xf32>
          %44 = math.fma %31, %43, %15 : vector<8xf32>
          %45 = math.fma %38, %43, %16 : vector<8xf32>
          %46 = arith.subi %14, %c0 : index
          %47 = arith.muli %46, %c10 : index
          %48 = arith.addi %47, %c2 : index
          %49 = memref.load %7[%48] : memref<64xf32>
          %50 = vector.broadcast %49 : f32 to vector<8xf32>
          %51 = math.fma %32, %50, %44 : vector<8xf32>
          %52 = math.fma %39, %50, %45 : vector<8xf32>
          %53 = arith.addi %22, %4 : index
          memref.prefetch %m1[%53, %20, %c3], read, locality<3>, data : memref<2x32x64xi8>
          %54 = arith.addi %14, %c2 : index
// 74 lines more
          %127 = arith.subi %112, %c0 : index
          %128 = arith.muli %127, %c10 : index
          %129 = memref.load %7[%128] : memref<64xf32>
          %130 = vector.broadcast %129 : f32 to vector<8xf32>
          %131 = math.fma %118, %130, %109 : vector<8xf32>
          %132 = math.fma %125, %130, %110 : vector<8xf32>
          %133 = arith.subi %112, %c0 : index
          %134 = arith.muli %133, %c10 : index
          %135 = arith.addi %134, %c2 : index
          %136 = memref.load %7[%135] : memref<64xf32>
          %137 = vector.broadcast %136 : f32 to vector<8xf32>
          %138 = math.fma %119, %137, %131 : vector<8xf32>
          %139 = math.fma %126, %137, %132 : vector<8xf32>
          scf.yield %138, %139 : vector<8xf32>, vector<8xf32>
        }
